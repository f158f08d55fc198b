"""The same federated job run by this project, by its peers and by a plain loop, each as a process of its own."""
