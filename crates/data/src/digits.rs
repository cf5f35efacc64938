//! The 8×8 handwritten digits: embedded file → [`Digits`].
//!
//! The gzipped table is inflated and parsed once, at the first call of [`digits`]. One line is one sample: 64 pixels
//! and the digit, all integers. Where the file comes from and its licence: `assets/LICENSE-digits.md`.

use std::io::Read;
use std::sync::OnceLock;

use crate::{DataError, Dataset};
use flate2::read::GzDecoder;

/// The pixels of one image: 8 rows of 8.
const PIXELS: usize = 64;
/// A pixel counts the dark cells of a 4×4 block of the scan, so it is 0 to 16.
const BRIGHTEST: u8 = 16;
const CLASSES: u8 = 10;

/// Handwritten digits, split for training and testing.
///
/// The split is fixed: counting samples from 0 in file order, those in every fifth block of ten
/// (`index / 10 % 5 == 4`) are the test set. That makes **1440 to train on and 357 to test with**, 1797 in all.
/// The file often runs through the ten digits in order, so whole blocks keep the classes even (33 to 39 of each
/// digit in the test set), where every fifth sample would not (21 to 52). The 13 writers are not kept apart: the
/// test accuracy speaks about known hands, not new ones.
#[derive(Clone, Debug, PartialEq)]
pub struct Digits {
    /// The 1440 samples to train on.
    pub train: Split,
    /// The 357 samples to test with.
    pub test: Split,
}

/// A run of samples.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Split {
    /// The images one after the other, 64 values each, row by row; 0 is blank and 1 is full ink.
    pub pixels: Vec<f32>,
    /// The digit that each image shows, 0 to 9.
    pub labels: Vec<i64>,
}

/// The embedded digits, decoded at the first call.
///
/// ```
/// let digits = kiln_data::digits();
/// assert_eq!((digits.train.len(), digits.test.len()), (1440, 357));
/// ```
pub fn digits() -> &'static Digits {
    static DIGITS: OnceLock<Digits> = OnceLock::new();
    DIGITS.get_or_init(|| {
        let mut text = String::new();
        let packed: &[u8] = include_bytes!("../assets/digits.csv.gz");
        GzDecoder::new(packed).read_to_string(&mut text).expect("the embedded digits inflate");
        parse(&text).expect("the embedded digits parse")
    })
}

/// Reads the table: a sample per line, 64 pixels from 0 to 16 and a digit, separated by commas.
///
/// The split of [`Digits`] is applied to whatever number of lines there is; no line at all is no sample.
pub fn parse(text: &str) -> Result<Digits, ParseError> {
    let mut digits = Digits { train: Split::default(), test: Split::default() };
    for (index, line) in text.lines().enumerate() {
        let split = if index / 10 % 5 == 4 { &mut digits.test } else { &mut digits.train };
        parse_line(line, split).map_err(|(column, reason)| ParseError { line: index + 1, column, reason })?;
    }
    Ok(digits)
}

impl Split {
    /// The number of samples.
    pub fn len(&self) -> usize {
        self.labels.len()
    }

    /// Whether there is no sample.
    pub fn is_empty(&self) -> bool {
        self.labels.is_empty()
    }

    /// The 64 pixels of one sample.
    ///
    /// # Panics
    ///
    /// If there are not more than `index` samples.
    #[track_caller]
    pub fn image(&self, index: usize) -> &[f32] {
        assert!(index < self.len(), "sample {index} of a split of {}", self.len());
        &self.pixels[index * PIXELS..][..PIXELS]
    }
}

/// A sample is the 64 pixels of an image and its digit.
impl Dataset for Split {
    type Sample = (Vec<f32>, i64);

    fn len(&self) -> usize {
        self.labels.len()
    }

    fn sample(&self, index: usize) -> Result<(Vec<f32>, i64), DataError> {
        let &label = self.labels.get(index).ok_or(DataError::NoSample { len: self.labels.len() })?;
        Ok((self.image(index).to_vec(), label))
    }
}

/// Where and why a table of digits cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}, column {column}: {reason}")]
pub struct ParseError {
    /// The line, counted from 1.
    pub line: usize,
    /// The field in the line, counted from 1.
    pub column: usize,
    /// What is wrong there.
    pub reason: Reason,
}

/// What is wrong with a field.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Reason {
    /// A pixel is not an integer from 0 to 16.
    #[error("pixel {found:?} is not an integer from 0 to 16")]
    Pixel {
        /// The text of the field.
        found: String,
    },
    /// A label is not an integer from 0 to 9.
    #[error("label {found:?} is not a digit from 0 to 9")]
    Label {
        /// The text of the field.
        found: String,
    },
    /// The line ends before its 65 fields do.
    #[error("the line ends here, a sample has 65 fields")]
    Missing,
    /// The line goes on after its 65 fields.
    #[error("a sample has only 65 fields")]
    Extra,
}

fn parse_line(line: &str, split: &mut Split) -> Result<(), (usize, Reason)> {
    let mut fields = line.split(',');
    for column in 1..=PIXELS {
        let field = fields.next().ok_or((column, Reason::Missing))?;
        let pixel =
            integer(field, BRIGHTEST).ok_or_else(|| (column, Reason::Pixel { found: field.into() }))?;
        split.pixels.push(f32::from(pixel) / f32::from(BRIGHTEST));
    }
    let column = PIXELS + 1;
    let field = fields.next().ok_or((column, Reason::Missing))?;
    let label = integer(field, CLASSES - 1).ok_or_else(|| (column, Reason::Label { found: field.into() }))?;
    split.labels.push(i64::from(label));
    match fields.next() {
        None => Ok(()),
        Some(_) => Err((column + 1, Reason::Extra)),
    }
}

fn integer(field: &str, max: u8) -> Option<u8> {
    field.parse().ok().filter(|&value| value <= max)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn embedded_file_is_whole() {
        let Digits { train, test } = digits();
        assert_eq!((train.len(), test.len(), train.len() + test.len()), (1440, 357, 1797));
        for split in [train, test] {
            assert!(!split.is_empty());
            assert_eq!(split.pixels.len(), split.len() * PIXELS);
            assert!(split.pixels.iter().all(|pixel| (0.0..=1.0).contains(pixel)));
            assert_eq!(split.pixels.iter().copied().fold(0.0, f32::max), 1.0);
        }
        assert!(std::ptr::eq(digits(), digits()));
    }

    #[test]
    fn classes_are_even_in_both_parts() {
        let count =
            |split: &Split| (0..10).map(|d| split.labels.iter().filter(|&&l| l == d).count()).collect();
        let (train, test): (Vec<_>, Vec<_>) = (count(&digits().train), count(&digits().test));
        assert_eq!(train, [143, 145, 143, 146, 147, 149, 145, 144, 135, 143]);
        assert_eq!(test, [35, 37, 34, 37, 34, 33, 36, 35, 39, 37]);
    }

    #[test]
    fn first_image_is_the_zero_of_the_file() {
        let train = &digits().train;
        let rows: Vec<String> = (train.image(0).chunks(8))
            .map(|row| row.iter().map(|&pixel| if pixel > 0.4 { '#' } else { '.' }).collect())
            .collect();
        assert_eq!(train.labels[0], 0);
        let zero =
            ["...##...", "..####..", "..#..##.", "..#..##.", "..#..##.", "..#..##.", "..#.##..", "...##..."];
        assert_eq!(rows, zero);
    }

    #[test]
    fn every_fifth_block_of_ten_is_test() {
        let text: String = (0..60).map(|i| format!("{}{}\n", "0,".repeat(PIXELS), i / 10)).collect();
        let Digits { train, test } = parse(&text).unwrap();
        assert_eq!(test.labels, [4; 10]);
        assert_eq!((train.len(), train.labels.contains(&4)), (50, false));
    }

    #[test]
    fn line_ends_do_not_matter() {
        let line = "16,".repeat(PIXELS) + "3";
        let unix = parse(&format!("{line}\n{line}\n")).unwrap();
        assert_eq!(unix.train.labels, [3, 3]);
        assert_eq!(parse(&format!("{line}\r\n{line}")).unwrap(), unix);
        assert!(parse("").unwrap().train.is_empty());
    }

    #[test]
    fn bad_fields_are_named() {
        let pixel = |found: &str| Reason::Pixel { found: found.into() };
        let label = |found: &str| Reason::Label { found: found.into() };
        let good = "0,".repeat(PIXELS) + "9";
        let fails = |line: String, column: usize, reason: Reason| {
            let expected = ParseError { line: 2, column, reason };
            assert_eq!(parse(&format!("{good}\n{line}\n{good}\n")), Err(expected), "{line:?}");
        };
        fails(String::new(), 1, pixel(""));
        fails("0,17,0".into(), 2, pixel("17"));
        fails("0,0,-1".into(), 3, pixel("-1"));
        fails("999".into(), 1, pixel("999"));
        fails("0, 1".into(), 2, pixel(" 1"));
        fails("0.5".into(), 1, pixel("0.5"));
        fails("0,0,é".into(), 3, pixel("é"));
        fails("1,2,3".into(), 4, Reason::Missing);
        fails("0,".repeat(PIXELS) + "10", 65, label("10"));
        fails("0,".repeat(PIXELS), 65, label(""));
        fails("0,".repeat(PIXELS - 1) + "0", 65, Reason::Missing);
        fails(good.clone() + ",", 66, Reason::Extra);
    }

    #[test]
    fn errors_read_well() {
        let error = parse("0,x").unwrap_err();
        assert_eq!(error.to_string(), "line 1, column 2: pixel \"x\" is not an integer from 0 to 16");
    }
}
