"""Runs verl with EEPO: `python -m eepo.adapters.verl`."""

from eepo.adapters.verl.launch import main

if __name__ == "__main__":
    main()
