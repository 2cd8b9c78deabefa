"""Pages on a warehouse, rendered from queries: no script, no state but the URL's. Start reading at `pages`."""
