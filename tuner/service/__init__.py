"""The planning service: the web server and page of ``tune serve``, and the web page of ``tune report``.

The server process reads and checks requests and keeps the database. All computations run in worker processes
(`ebbtide.tuner.service.worker`). So no request can stop the server, slow it down or use up its memory.
"""
