"""What an institution runs: its own policy over what leaves, its own account of privacy, its own audit trail.

`policy` reads the site's `policy.toml`, `describing` says it in words, and `guard` enforces it around any handler, in
the site's process; `ledger` keeps the privacy account on disk; `content` names a recipe by its content; `clientapp` is
the command with which a SuperNode runs the site's installed code instead of code the server sends, and `caller` its
quick beginning. `worker` is the process that stays and holds the site's data; `warm` asks it, in `frames`, to work on
what `orders` describes.

A folder is all there is of a server or a site: `layout` says what lies where, `founding` makes it with the `keys`,
`processes` starts and ends what runs in it (`superlink` and `supernode` are Flower's, with a door and with patience),
`admission` says which sites get in, `submitting` hands a recipe over, `keeping` sees it through to its end, `doctor`
finds what is wrong, and `rehearse` does all of it on one machine. `admin` shows what goes on, on a page and for
machines; `pausing` is a site's switch.
"""
