"""Official data sets: each module holds the URLs, the layout on disk and the reader of one family.

`OfficialSource.fetch` downloads the files, and `dgl.data` and `ogb` only read them: their own downloads have no
time-outs and trust half-written folders, and ogb asks questions at the terminal.
"""
