"""What the tests share. tests/ is on their path."""
