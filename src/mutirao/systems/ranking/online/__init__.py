"""Online learning to rank: a ranker that is shown to users and learns from their clicks, each user being a client."""
