"""`python -m grafting.sensitivity`: run one job of the stage sensitivity."""

from grafting.provenance.runner import main

if __name__ == "__main__":
    main("grafting.sensitivity.stage:run")
