"""Sources that lie elsewhere: stores list their files, one downloader fetches them from any store.

A listing, a file of the run, fixes what is fetched: names, sizes and checksums.
"""
