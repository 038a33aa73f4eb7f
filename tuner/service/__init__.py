"""The what-if service: `tune serve`, its routes, its jobs and its page; and `tune report`.

The server process reads and checks requests and keeps the store. Everything that computes runs in
worker processes (`ebbtide.tuner.service.worker`), so that no request can stop, slow down or fill the
process that all clients talk to.
"""
