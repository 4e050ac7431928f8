"""What measures, simulates, checks and draws. Every notebook begins with ``kvbook.lab.setup()``."""
from .session import setup

__all__ = ["setup"]
