"""Knowledge that changes: registry, triage, ingestion, snapshots, rebuild, and what is kept of a cycle."""
