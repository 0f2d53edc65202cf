"""Writes one HTML file about a run: `python -m workflow.report --run DIR --output FILE.html`."""
