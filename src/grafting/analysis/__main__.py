"""`python -m grafting.analysis`: the stage report."""

from grafting.provenance.runner import main

if __name__ == "__main__":
    main("grafting.analysis.report:run")
