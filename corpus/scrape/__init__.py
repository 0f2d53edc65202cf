"""Scrape pages from the network or from WARC files: crawl, fetch, robots.txt, journal, archive."""
