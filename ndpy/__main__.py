"""`python -m ndpy`: the command line."""

from ndpy.cli import main

if __name__ == "__main__":
    main()
