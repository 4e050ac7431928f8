"""What tensors do: torch."""
