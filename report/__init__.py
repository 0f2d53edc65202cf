"""Writes one HTML file about a run: `python -m report --run DIR --output FILE.html`."""
