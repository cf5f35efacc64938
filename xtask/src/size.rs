//! Counts of the tree's shape, for the page on what a change costs: lines, long files, long functions, shared names.
//!
//! Counted are the sources of all crates (`src` below `crates` and `checks`), tests left out. It relies on rustfmt: an
//! item ends at the first line that closes a brace at the indentation of its first line.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::{fs, io};

const LONG_FILE: usize = 400;
const LONG_FUNCTION: usize = 60;

/// Prints the counts of the tree at `root`.
pub fn print(root: &Path) -> io::Result<()> {
    let mut files = Vec::new();
    for place in ["crates", "checks"].map(|place| root.join(place)) {
        if place.is_dir() {
            sources(&place, &mut files)?;
        }
    }
    files.sort();
    let (mut lines, mut cpu, mut long_files) = (0, 0, Vec::new());
    let (mut functions, mut long_functions) = (0, Vec::new());
    let mut types: BTreeMap<String, usize> = BTreeMap::new();
    for path in &files {
        let text = fs::read_to_string(path)?;
        let name = path.strip_prefix(root).unwrap_or(path).display().to_string();
        let text: Vec<&str> = text.lines().collect();
        lines += text.len();
        if name.starts_with("crates/cpu/") {
            cpu += text.len();
        }
        if text.len() > LONG_FILE {
            long_files.push((text.len(), name.clone()));
        }
        for (at, length, function) in functions_of(&text) {
            functions += 1;
            if length > LONG_FUNCTION {
                long_functions.push((length, format!("{name}:{at} {function}")));
            }
        }
        types_of(&text).for_each(|name| *types.entry(name).or_default() += 1);
    }
    let shared: Vec<_> = types.into_iter().filter(|(_, count)| *count > 1).collect();
    println!("files                    {}", files.len());
    println!("lines                    {lines}");
    println!("lines in cpu             {cpu}");
    println!("functions                {functions}");
    println!("files above {LONG_FILE} lines     {}", long_files.len());
    println!("functions above {LONG_FUNCTION} lines {}", long_functions.len());
    println!(
        "names of several types   {} ({} types)",
        shared.len(),
        shared.iter().map(|s| s.1).sum::<usize>()
    );
    for (title, mut list) in [("files", long_files), ("functions", long_functions)] {
        list.sort_by(|a, b| b.cmp(a));
        println!("\nlong {title}:");
        list.iter().for_each(|(length, name)| println!("{length:6} {name}"));
    }
    println!("\nshared names:");
    shared.iter().filter(|(_, count)| *count > 2).for_each(|(name, count)| println!("{count:6} {name}"));
    Ok(())
}

/// The Rust files below the `src` folders of a folder of crates.
fn sources(dir: &Path, files: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if path.is_dir() {
            if !matches!(name, "tests" | "benches" | "target" | "corpus") {
                sources(&path, files)?;
            }
        } else if name.ends_with(".rs")
            && name != "tests.rs"
            && path.components().any(|c| c.as_os_str() == "src")
        {
            files.push(path);
        }
    }
    Ok(())
}

/// Where each function begins, how many lines it has, and its name.
fn functions_of<'a>(text: &'a [&'a str]) -> impl Iterator<Item = (usize, usize, &'a str)> {
    text.iter().enumerate().filter_map(|(at, line)| {
        let trimmed = line.trim_start();
        let words = ["pub ", "pub(crate) ", "pub(super) ", "const ", "unsafe ", "async ", "extern \"C\" "];
        let mut rest = trimmed;
        while let Some(word) = words.iter().find_map(|word| rest.strip_prefix(word)) {
            rest = word;
        }
        let name = rest.strip_prefix("fn ")?.split(['(', '<']).next()?;
        let end = format!("{}}}", &line[..line.len() - trimmed.len()]);
        let length = match line.ends_with('}') || line.ends_with(';') {
            true => 1,
            false => {
                text[at..]
                    .iter()
                    .position(|line| *line == end || line.ends_with(");") && line.len() == end.len() + 1)?
                    + 1
            }
        };
        Some((at + 1, length, name))
    })
}

/// The names of the structs, enums, traits and unions.
fn types_of<'a>(text: &'a [&'a str]) -> impl Iterator<Item = String> + 'a {
    text.iter().filter_map(|line| {
        let line = line.trim_start();
        let line = line
            .strip_prefix("pub ")
            .or(line.strip_prefix("pub(crate) "))
            .or(line.strip_prefix("pub(super) "))
            .unwrap_or(line);
        let line = line.strip_prefix("unsafe ").unwrap_or(line);
        let rest =
            ["struct ", "enum ", "trait ", "union "].iter().find_map(|word| line.strip_prefix(word))?;
        Some(rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect())
    })
}
