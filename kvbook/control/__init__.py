"""What the CPU decides: pure Python, standard library only."""
