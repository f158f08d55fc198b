"""What an institution runs: its own policy over what leaves, its own account of privacy, its own audit trail.

`policy` reads the site's `policy.toml`; `guard` enforces it around any handler, in the site's process; `ledger` keeps
the privacy account on disk; `content` names a recipe by its content; `clientapp` is the command with which a SuperNode
runs the site's installed code instead of code the server sends. Whatever starts and watches a site's processes is to
be built on these: it writes `policy_template()` once, and passes `--node-config 'name="..." policy="..."'`.
"""
