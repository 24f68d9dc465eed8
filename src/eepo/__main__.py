"""`python -m eepo` is the command `eepo`."""

from eepo.cli import main

if __name__ == "__main__":
    main()
