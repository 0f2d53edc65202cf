"""The DAG, and what works on a whole run: rules, report, cards, demo, provenance."""
