"""Running the notebooks as a build, and the report about a run."""
