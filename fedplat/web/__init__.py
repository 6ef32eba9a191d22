"""What the pages of all programs have in common: who may see them, how they are served, their layout and style.

The dashboard of a server and the page of a client's owner are built on it. It needs Starlette, Jinja2 and uvicorn
(extra "pages").
"""
