"""Other ways of clustered federated learning, as their authors define them: IFCA, CFL, PACFL, FedClust."""
