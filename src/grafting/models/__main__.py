"""Stage models, for checkpoints that exist: python -m grafting.models (called by the workflow)."""

from grafting.provenance.runner import main

if __name__ == "__main__":
    main("grafting.models.stage:run")
