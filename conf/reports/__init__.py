"""HTML pages of all commands: typed blocks, the templates and style sheet that draw them, and charts as SVG.

Start reading at `blocks.Page`; `blocks.render_page` returns its HTML.
"""
