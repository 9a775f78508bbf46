"""Official data sets: each module knows one family's URLs, its on-disk layout, and how to read it.

`dgl.data` and `ogb` would download on their own, but without time-outs, trusting half-written folders, and ogb with
questions at the terminal. So `OfficialSource.fetch` puts the files in place first, and the libraries only read them.
"""
