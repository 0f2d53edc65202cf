"""Cards of a finished run: what its corpus and its models were made of, for the places where they are published."""
