"""Asynchronous parameter server: servers hold shards of the weights; workers push updates to them and pull weights."""
