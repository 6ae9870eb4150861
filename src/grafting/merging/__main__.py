"""`python -m grafting.merging`: run one job of the stage merge."""

from grafting.provenance.runner import main

if __name__ == "__main__":
    main("grafting.merging.stage:run")
