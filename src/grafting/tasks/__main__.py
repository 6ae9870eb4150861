"""Stage data: python -m grafting.tasks (called by the workflow)."""

from grafting.provenance.runner import main

if __name__ == "__main__":
    main("grafting.tasks.stage:run")
