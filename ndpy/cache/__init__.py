"""The registration cache. Import its classes from ndpy."""
