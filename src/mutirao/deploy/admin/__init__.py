"""What those who run a server or a site see of it: the same facts on a page and in `site status --json`."""
