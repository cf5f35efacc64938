//! README text → the shell blocks that its author promises to work.
//!
//! The promise is a line `<!-- run -->` right before a block fenced by ```` ```sh ````; blank lines may lie between.

use std::fmt;

/// A marked block.
#[derive(Debug, PartialEq)]
pub struct Block {
    /// The line of its fence, counted from 1.
    pub line: usize,
    pub script: String,
}

/// A mark that promises nothing, by its line: left as it is, it would look tested and never be.
#[derive(Debug, PartialEq)]
pub enum Fault {
    NoBlock { line: usize },
    Unclosed { line: usize },
}

pub fn marked(text: &str) -> Result<Vec<Block>, Fault> {
    let mut blocks = Vec::new();
    let mut lines = text.lines().zip(1..);
    while let Some((text, mark)) = lines.next() {
        if text.trim() != "<!-- run -->" {
            continue;
        }
        let Some((_, line)) =
            lines.find(|(text, _)| !text.trim().is_empty()).filter(|(text, _)| *text == "```sh")
        else {
            return Err(Fault::NoBlock { line: mark });
        };
        let mut script = String::new();
        loop {
            match lines.next() {
                None => return Err(Fault::Unclosed { line }),
                Some(("```", _)) => break,
                Some((text, _)) => script += &format!("{text}\n"),
            }
        }
        blocks.push(Block { line, script });
    }
    Ok(blocks)
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fault::NoBlock { line } => write!(f, "line {line}: no sh block follows the mark"),
            Fault::Unclosed { line } => write!(f, "line {line}: the block has no end"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_marked_blocks_are_taken() {
        let text = "# Kiln\n```sh\nrm x\n```\n<!-- run -->\n\n```sh\na\nb\n```\ntext\n <!-- run -->\n```sh\nc\n```\n";
        let blocks = [Block { line: 7, script: "a\nb\n".into() }, Block { line: 13, script: "c\n".into() }];
        assert_eq!(marked(text).unwrap(), blocks);
        assert_eq!(marked("no blocks"), Ok(Vec::new()));
    }

    #[test]
    fn marks_without_a_whole_block_are_faults() {
        assert_eq!(marked("<!-- run -->\n```rust\n```\n"), Err(Fault::NoBlock { line: 1 }));
        assert_eq!(marked("\n<!-- run -->\n"), Err(Fault::NoBlock { line: 2 }));
        assert_eq!(marked("<!-- run -->\n```sh\na\n"), Err(Fault::Unclosed { line: 2 }));
    }
}
