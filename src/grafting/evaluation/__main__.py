"""`python -m grafting.evaluation`: the stage evaluate."""

from grafting.provenance.runner import main

if __name__ == "__main__":
    main("grafting.evaluation.stage:run")
