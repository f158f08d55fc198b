"""Federated recommendation whose users keep a part of the model: FMF, FCF, PFedRec and FedRAP, each a small file."""
