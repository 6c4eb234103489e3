"""`python -m rockplan` is the command `rockplan`."""

from rockplan.cli.main import main

if __name__ == "__main__":
    main()
