"""Federated recommendation with personal parameters: FMF, FCF, PFedRec and FedRAP, one file for each method."""
