"""Chapter 7: from operators to loops. `lower(graph) -> Program`; `run_program` runs one slowly."""
