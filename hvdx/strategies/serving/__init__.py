"""Asynchronous parameter server: servers hold parts of the weights; workers push updates to them and pull weights."""
