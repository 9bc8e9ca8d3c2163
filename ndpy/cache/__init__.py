"""The registration cache. Import its classes from ndpy: they need the compiled module ndpy._lease."""
