"""The planning service: ``tune serve`` with its routes, jobs and page, and ``tune report``.

The server process reads and checks requests and keeps the database. All computations run in worker
processes (`ebbtide.tuner.service.worker`), so that no request can stop, slow down or fill the process that
all clients talk to.
"""
