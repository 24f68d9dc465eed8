"""`python -m eepo.adapters.verl`: verl's command line, with EEPO."""

from eepo.adapters.verl.launch import main

if __name__ == "__main__":
    main()
