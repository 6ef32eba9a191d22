"""`python -m fedplat.cli` is the command `fedplat`."""

from fedplat.cli import main

if __name__ == "__main__":
    main()
