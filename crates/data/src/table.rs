//! CSV files: a table of text in memory, whose fields are read as numbers or classes row by row.

use crate::input::Input;
use crate::{DataError, Dataset, Fault};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

/// A CSV file, plain or gzip, as a data set of [`Row`]s.
///
/// ```
/// use kiln_data::{Csv, DataLoader, Dataset};
///
/// let table = Csv::parse(b"length,width,species\n5.1,3.5,setosa\n6.2,2.9,virginica\n")?;
/// let species = table.classes("species")?;
/// assert_eq!(species, ["setosa", "virginica"]);
/// let flowers = table.try_map(move |row| Ok((row.numbers(["length", "width"])?, row.class("species", &species)?)));
/// assert_eq!(flowers.sample(1)?, (vec![6.2, 2.9], 1));
/// let train = DataLoader::new(flowers).batch(2).shuffle(1);
/// # Ok::<(), kiln_data::DataError>(())
/// ```
///
/// A field that cannot be read is an error that names the file, the line and the column.
#[derive(Clone, Debug)]
pub struct Csv(Arc<Table>);

/// How a CSV file is written.
#[derive(Clone, Debug)]
pub struct CsvOptions {
    /// What stands between fields: a comma.
    pub delimiter: u8,
    /// Whether the first line names the columns, as it does. Without it they are called "0", "1", and so on.
    pub header: bool,
}

impl Default for CsvOptions {
    fn default() -> CsvOptions {
        CsvOptions { delimiter: b',', header: true }
    }
}

#[derive(Debug)]
struct Table {
    path: PathBuf,
    columns: Vec<String>,
    /// The fields of all rows without what stood between them.
    text: String,
    /// Where each field ends in it.
    ends: Vec<usize>,
    /// The line where each row begins, from 1.
    lines: Vec<u64>,
}

impl Csv {
    /// Reads a file whose first line names the columns.
    pub fn open(path: impl AsRef<Path>) -> Result<Csv, DataError> {
        Csv::open_with(path, &CsvOptions::default())
    }

    /// Reads a file that is written in another way.
    pub fn open_with(path: impl AsRef<Path>, options: &CsvOptions) -> Result<Csv, DataError> {
        Csv::read(Input::open(path.as_ref())?, options)
    }

    /// Reads bytes whose first line names the columns.
    pub fn parse(bytes: &[u8]) -> Result<Csv, DataError> {
        Csv::parse_with(bytes, &CsvOptions::default())
    }

    /// Reads bytes that are written in another way.
    pub fn parse_with(bytes: &[u8], options: &CsvOptions) -> Result<Csv, DataError> {
        Csv::read(Input::memory(bytes)?, options)
    }

    fn read(mut input: Input<'_>, options: &CsvOptions) -> Result<Csv, DataError> {
        let path = input.path().to_path_buf();
        let table = read(&mut input, options, path.clone());
        table.map(|table| Csv(Arc::new(table))).map_err(|fault| fault.at(path))
    }

    /// The names of the columns.
    pub fn columns(&self) -> &[String] {
        &self.0.columns
    }

    /// The number of rows.
    pub fn rows(&self) -> usize {
        self.0.lines.len()
    }

    /// A row, if there are so many.
    pub fn row(&self, index: usize) -> Option<Row> {
        (index < self.rows()).then(|| Row { table: self.0.clone(), index })
    }

    /// The different values of a column, sorted: its classes.
    pub fn classes(&self, column: &str) -> Result<Vec<String>, DataError> {
        let at = self.0.column(column)?;
        let all: BTreeSet<&str> = (0..self.rows()).map(|row| self.0.field(row, at)).collect();
        Ok(all.into_iter().map(str::to_owned).collect())
    }
}

impl Dataset for Csv {
    type Sample = Row;

    fn len(&self) -> usize {
        self.rows()
    }

    fn sample(&self, index: usize) -> Result<Row, DataError> {
        self.row(index).ok_or(DataError::NoSample { len: self.rows() })
    }

    fn origin(&self, index: usize) -> Option<String> {
        let line = self.0.lines.get(index)?;
        Some(format!("line {line} of {}", self.0.path.display()))
    }
}

/// A row of a [`Csv`].
#[derive(Clone, Debug)]
pub struct Row {
    table: Arc<Table>,
    index: usize,
}

impl Row {
    /// The text of a field.
    pub fn text(&self, column: &str) -> Result<&str, DataError> {
        Ok(self.table.field(self.index, self.table.column(column)?))
    }

    /// A field as a number, or whatever else can be read from text; blanks around it do not count.
    pub fn parse<T: FromStr<Err: std::fmt::Display>>(&self, column: &str) -> Result<T, DataError> {
        let text = self.text(column)?;
        text.trim().parse().map_err(|e: T::Err| self.wrong(column, format!("{e}: {:?}", shortened(text))))
    }

    /// Several fields as f32, in the order given.
    pub fn numbers<'c>(&self, columns: impl IntoIterator<Item = &'c str>) -> Result<Vec<f32>, DataError> {
        columns.into_iter().map(|column| self.parse(column)).collect()
    }

    /// The place of a field's text among `classes`.
    pub fn class(&self, column: &str, classes: &[String]) -> Result<i64, DataError> {
        let text = self.text(column)?;
        let place = classes.iter().position(|class| class == text);
        let wrong =
            || self.wrong(column, format!("{:?} is none of {} classes", shortened(text), classes.len()));
        place.map(|place| place as i64).ok_or_else(wrong)
    }

    fn wrong(&self, column: &str, message: String) -> DataError {
        let line = self.table.lines[self.index];
        Fault::Line { line, column: Some(column.into()), message }.at(&self.table.path)
    }
}

/// A field as errors show it.
fn shortened(text: &str) -> String {
    text.chars().take(40).collect()
}

impl Table {
    fn column(&self, name: &str) -> Result<usize, DataError> {
        let place = self.columns.iter().position(|column| column == name);
        let columns = || self.columns.iter().take(40).map(|column| shortened(column)).collect();
        place.ok_or_else(|| Fault::Column { column: name.into(), columns: columns() }.at(&self.path))
    }

    fn field(&self, row: usize, column: usize) -> &str {
        let at = row * self.columns.len() + column;
        let start = at.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.text[start..self.ends[at]]
    }
}

fn read(input: &mut Input<'_>, options: &CsvOptions, path: PathBuf) -> Result<Table, Fault> {
    let mut reader =
        csv::ReaderBuilder::new().delimiter(options.delimiter).has_headers(options.header).from_reader(input);
    let mut table =
        Table { path, columns: Vec::new(), text: String::new(), ends: Vec::new(), lines: Vec::new() };
    if options.header {
        let mut names: Vec<String> = reader.headers().map_err(fault)?.iter().map(str::to_owned).collect();
        // What spreadsheets put before everything else.
        if let Some(first) = names.first_mut().filter(|first| first.starts_with('\u{feff}')) {
            first.remove(0);
        }
        table.columns = names;
    }
    let mut row = csv::StringRecord::new();
    while reader.read_record(&mut row).map_err(fault)? {
        if table.columns.is_empty() {
            table.columns = (0..row.len()).map(|column| column.to_string()).collect();
        }
        for field in &row {
            table.text.push_str(field);
            table.ends.push(table.text.len());
        }
        table.lines.push(row.position().map_or(0, csv::Position::line));
    }
    Ok(table)
}

fn fault(error: csv::Error) -> Fault {
    let line = |at: Option<&csv::Position>| at.map_or(0, csv::Position::line);
    match error.into_kind() {
        csv::ErrorKind::Io(error) => error.into(),
        csv::ErrorKind::Utf8 { pos, err } => {
            Fault::Line { line: line(pos.as_ref()), column: None, message: err.to_string() }
        }
        csv::ErrorKind::UnequalLengths { pos, expected_len, len } => {
            let message = format!("{len} fields where the first line has {expected_len}");
            Fault::Line { line: line(pos.as_ref()), column: None, message }
        }
        other => Fault::Line { line: 0, column: None, message: format!("{other:?}") },
    }
}
