"""Break a federation on purpose, and see that it ends as if nobody had: `mutirao drill`.

Real processes with TLS and keys are killed, cut off and lied to while they train. A trial is good if the run ends with
the digest it should have, that of a run nobody disturbed, and leaves no process and no port behind.
"""
