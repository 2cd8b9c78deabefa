"""The HTML pages of all commands: typed blocks, the templates and the style sheet that draw them, and SVG shapes.

Start reading at `blocks.Page`; `render.render_page` makes the HTML of one.
"""
