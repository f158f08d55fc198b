"""Deployment of a federation on real machines: servers, sites, and each site's own policy.

A server or a site is one folder: `layout` defines its files, `provisioning` creates it with the `keys`, and `processes`
starts and stops what runs in it. `server/` has the SuperLink with its middlewares, the admission of sites, and runs:
their submission and supervision. `site/` has the SuperNode, the client command that runs only installed code, and the
resident worker that holds torch and the site's data. `policy/` has the rules of a site, their enforcement, pins and the
privacy ledger. `flower/` has the Flower apps, and `flower_patches` lists every function of Flower that is replaced.

`doctor` checks a folder, `rehearsal` runs a whole federation on one machine, `admin/` shows a server or a site on a
page, and `processing_record` writes the record of processing activities.
"""
