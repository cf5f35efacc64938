//! Patterns of parameter paths.

/// Whether a path matches a pattern, in which `*` stands for any number of characters, dots included, and `?` for one:
/// `encoder.*` are all paths below `encoder`, `*.bias` all biases.
///
/// ```
/// # use kiln_nn::matches;
/// assert!(matches("blocks.*.bias", "blocks.3.attention.bias"));
/// assert!(!matches("blocks.?.bias", "blocks.12.bias"));
/// ```
pub fn matches(pattern: &str, path: &str) -> bool {
    let (pattern, path): (Vec<char>, Vec<char>) = (pattern.chars().collect(), path.chars().collect());
    let (mut p, mut s) = (0, 0);
    // Where the last star is, and what it covers up to: only that one is ever tried again.
    let mut star = None;
    while s < path.len() {
        match pattern.get(p) {
            Some('*') => {
                star = Some((p, s));
                p += 1;
            }
            Some(&c) if c == '?' || c == path[s] => (p, s) = (p + 1, s + 1),
            _ => match star {
                Some((at, end)) => {
                    star = Some((at, end + 1));
                    (p, s) = (at + 1, end + 1);
                }
                None => return false,
            },
        }
    }
    pattern[p..].iter().all(|&c| c == '*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stars_cover_dots_and_nothing() {
        for (pattern, path, expect) in [
            ("weight", "weight", true),
            ("weight", "a.weight", false),
            ("*weight", "weight", true),
            ("*.weight", "weight", false),
            ("*.weight", "a.b.weight", true),
            ("a.*", "a", false),
            ("*a*b*", "xxaxxbxx", true),
            ("*ab", "aab", true),
            ("*ab", "aba", false),
            ("", "", true),
            ("", "a", false),
            ("*", "", true),
            ("??", "ä.", true),
        ] {
            assert_eq!(matches(pattern, path), expect, "{pattern} {path}");
        }
    }
}
