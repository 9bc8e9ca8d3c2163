"""`python -m ndpy`: the command line."""

from ndpy.tools.cli import main

if __name__ == "__main__":
    main()
