"""Decentralised jobs in virtual time: the production coordinator of `fedplat.gossip` with simulated silos."""
