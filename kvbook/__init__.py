"""kvbook: a book that runs, and the LLM inference engine that the book exports.

Importing it changes nothing in the process and loads nothing heavy; take what you need from its modules,
for instance ``from kvbook.compute.checkpoint import load``.
"""
__version__ = "0.1.0"
